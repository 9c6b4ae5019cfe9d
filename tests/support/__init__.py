"""What the tests have in common: tiny models and tokenizers, plain oracles, stand-ins for servers and hosts."""
