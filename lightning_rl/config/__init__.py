"""What a user may say: constructors and configurations read alike, every mistake is named."""
