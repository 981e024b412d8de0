"""The page at `/`: static files, and what they need to know of the server.

routes.py       the files with their headers, and /v1/keyhole
index.html      what there is to see; style.css how it looks
app.js          starts everything; api.js requests and streams; store.js what the browser keeps
chat.js         messages; markdown.js their text; compare.js two answers side by side
reading.js      the reading view; settings.js, documents.js the panels
vendor/         marked and DOMPurify, with their licences
"""
