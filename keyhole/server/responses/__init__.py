"""/v1/responses, OpenAI's newer interface for chats.

routes.py   the route
bodies.py   the fields of requests, as messages of a chat
answer.py   the response, whole or as typed events
items.py    the items of a response: reasoning, messages, tool calls
history.py  conversations that later requests continue
"""
