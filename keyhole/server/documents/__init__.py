"""Documents as a service.

routes.py    /v1/documents
queue.py     encodes documents one after another, beside requests
callers.py   how many documents each caller may have
convert.py   files as text: Markdown, HTML, PDF, DOCX
passages.py  what an answer took from documents, for clients that cite
"""
