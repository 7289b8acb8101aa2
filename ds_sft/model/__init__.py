"""The model on one rank: loading under ZeRO-3, attention inside documents, chunked loss."""
