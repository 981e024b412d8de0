"""Keyhole inside other programs; each module requires an extra of the package.

lm_eval   the model "keyhole" of lm-evaluation-harness
kvpress   Keyhole's tasks under kvpress's compressors (presses)
vllm      Keyhole's policies inside vLLM's attention
ray       replicas of the server, and batches, on a Ray cluster
"""
