"""Pictures: how they get in, are checked, decoded, and laid into chats and tokens."""
