"""Chats: between OpenAI's messages and the text that a model reads and writes.

prompt.py        messages and tools as the tokens of a prompt, and the parsers of its reply
reply.py         splits a streamed reply into reasoning, answer and tool calls
reasoning.py     the markers of reasoning in a chat template
tool_formats.py  how the common chat templates write a tool call
tool_parser.py   finds tool calls in streamed text
xml_tool_parser.py  the same for calls that are written as XML elements
grammars.py      grammars of replies: response_format, tool_choice
"""
