"""From text to tokens and back: tokenizers, chat templates, and forms that a reply must have."""
