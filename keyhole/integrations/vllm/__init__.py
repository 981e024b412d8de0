"""Keyhole's policies inside vLLM's own attention.

    vllm serve MODEL --additional-config '{"keyhole": {"policy": "delta", "token_budget": 1024}}'
    vllm.LLM(MODEL, additional_config={"keyhole": {"policy": "quest", "token_budget": 1024}})
    KEYHOLE_VLLM='{"policy": "quest", "token_budget": 1024}' vllm serve MODEL

vLLM calls `start.register` in each of its processes, by the entry point in the group
`vllm.general_plugins`. Nothing changes until an engine asks for a policy.

    settings   what the user asked for, from `additional_config` or the environment
    page_policy  a policy as vLLM can run it: its selections are whole pages
    start      refuses, when an engine is configured, what cannot work; picks the attention backend
    step_rows  the decode tokens of a step as rows, from vLLM's metadata
    tables     the page tables and lengths that make vLLM read a selection alone
    adapter    a policy's hooks, called for the layers of a step
    backend    metadata builder and attention of a layer, over those of vLLM
    cpu, cuda  the backends that they extend
    counters   what was read: shared with the process that reports it
    metrics    the counters in vLLM's metrics and in its log
    documents  stored documents in prompts, by a KV connector
"""
