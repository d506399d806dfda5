"""The measured claims. Each figure stands beside a reference of the same run, since machines differ."""
