"""Keyhole's policies inside vLLM's own attention.

    vllm serve MODEL --additional-config '{"keyhole": {"policy": "delta", "token_budget": 1024}}'
    vllm.LLM(MODEL, additional_config={"keyhole": {"policy": "quest", "token_budget": 1024}})
    KEYHOLE_VLLM='{"policy": "quest", "token_budget": 1024}' vllm serve MODEL

vLLM calls `start.register` in each of its processes, by the entry point in the group
`vllm.general_plugins`. Nothing changes until an engine asks for a policy.

    settings     the plugin's settings, from `additional_config` or the environment
    page_policy  policies in a form that vLLM can run: they select whole pages
    start        checks an engine's configuration before it starts, chooses the attention backend
    step_rows    the decode tokens of a step as rows, from vLLM's metadata, and page tables with
                 which vLLM reads only the selected pages
    adapter      calls a policy's hooks for the layers of a step
    backend      metadata builder and attention of a layer, around vLLM's own
    cpu, cuda    the same for vLLM's CPU and CUDA backends
    counters     counts what was read, and shares it with the process that reports it
    metrics      the counters in vLLM's metrics and in its log
    documents    stored documents in prompts, by a KV connector
"""
