"""The on-disk format: layout, codecs, writer, reader, verify. Knows nothing of models, chats or ranks."""
