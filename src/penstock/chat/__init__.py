"""Messages to token ids and back: chat templates, the bridge between turns, tokenizers and reply parsers."""
