"""Pictures: loading, checking and decoding them, and placing them in chats and tokens."""
