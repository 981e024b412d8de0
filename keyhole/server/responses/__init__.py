"""/v1/responses, OpenAI's newer interface for chats.

routes.py   the route
bodies.py   the fields of requests, as messages of a chat
answer.py   the response and its items, whole or as typed events
history.py  conversations that later requests continue
"""
