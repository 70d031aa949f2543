"""The routes below `/v1`: OpenAI's and Anthropic's APIs over the runners' own."""
