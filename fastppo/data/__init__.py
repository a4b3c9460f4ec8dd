"""Prompts, chats and text files, and the batches made of them."""
