"""The front: Ollama's HTTP API for models that llama-server processes run."""
