"""The HTML page and the pictures of an evaluation."""
