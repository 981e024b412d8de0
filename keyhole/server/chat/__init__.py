"""Chats: what surrounds the text that a model reads and writes.

prompt.py        messages and tools as the tokens of a prompt, and how its reply is read
reply.py         the text of a reply as it comes: reasoning, answer and calls of tools
reasoning.py     where a chat template marks the reasoning before an answer
tool_formats.py  how the common chat templates write a call of a tool
tool_parser.py   finds calls in a text that comes piece by piece
xml_tool_parser.py  the same for calls that are written as elements
grammars.py      what a reply must follow: response_format, tool_choice
"""
