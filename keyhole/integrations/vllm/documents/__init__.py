"""Stored documents of Keyhole in prompts of vLLM.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "KeyholeConnector",
    "kv_role": "kv_consumer", "kv_connector_extra_config": {"documents": "s3://bucket/store"}}'
SamplingParams(extra_args={"kv_transfer_params": {"documents": ["a", "b"], "reuse": "epic"}})

facts      what the store and the rotation of keys need to know of a model
requests   checks a request and finds its documents in the prompt, in the frontend
connector  vLLM's interface: which tokens are loaded when, in the scheduler and in a worker
loader     writes stored keys and values into vLLM's pages, in a thread of a worker
forward    computes tokens in the middle of a prompt, by vLLM's model
choice     SamKV's choice: which pages each layer reads of a prompt's documents
layout     where a layer stores the tokens of a prompt in the request's pages
"""
