"""What several tasks share: words, filler, articles, fitting, scores."""
