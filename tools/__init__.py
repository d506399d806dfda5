"""Tools that a model may call: `types`, `schema`, `registry`, and one module per domain of built-in tools."""
