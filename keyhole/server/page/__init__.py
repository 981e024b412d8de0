"""The page at `/`: static files, and the route that describes the server to them.

routes.py       the files with their headers, and /v1/keyhole
index.html      the structure; style.css the appearance
app.js          starts everything; api.js requests and streams; store.js the browser's storage
chat.js         messages; markdown.js their text; compare.js two answers side by side
reading.js      the reading view; settings.js, documents.js the panels
vendor/         marked and DOMPurify, with their licences
"""
