"""/v1/responses, OpenAI's newer interface of chats.

routes.py   the route
bodies.py   what requests may say, as messages of a chat
answer.py   the response, whole or as typed events
items.py    what a response is made of: reasoning, messages, calls of tools
history.py  conversations that later requests continue
"""
