"""`keyhole eval --suite paper`: decides which methods are good enough for a checkpoint.

verify gate -> estimate -> tasks under every policy with its controls -> stored documents under
every reuse method -> a verdict for each -> one page, and a settings file that `LLM` loads
"""
