"""From text to block keys: incremental tokenization and chained block hashes."""
