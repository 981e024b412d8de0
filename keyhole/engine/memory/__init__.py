"""What an engine keeps where: pages, offloaded layers, shared prompts."""
