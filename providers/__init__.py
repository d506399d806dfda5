"""Model APIs behind one vocabulary: `types`, `errors`, and one adapter module per API."""
