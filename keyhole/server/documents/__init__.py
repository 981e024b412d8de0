"""Documents as a service.

routes.py    /v1/documents, and how many documents each caller may store
queue.py     encodes documents one after another in the background
convert.py   files as text: Markdown, HTML, PDF, DOCX
passages.py  the passages that an answer used, for clients that cite
"""
