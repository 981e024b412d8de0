"""Chats: between OpenAI's messages and the text that a model reads and writes.

prompt.py       messages and tools as the tokens of a prompt, and the parsers of its reply
reply.py        splits a streamed reply into reasoning, by its markers, answer and tool calls
tool_parser.py  how chat templates write tool calls, and parsers of streamed ones
parameters.py   which parameters of a tool are text, and which JSON
grammars.py     grammars of replies: response_format, tool_choice
"""
