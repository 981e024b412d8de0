"""What a decode step needs: inputs, state of policies, CUDA graphs, what was read."""
