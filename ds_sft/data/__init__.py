"""Chats to packed data sets and back: records, rendering and masks, packing, files. No torch."""
