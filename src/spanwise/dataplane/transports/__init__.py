"""The transports behind ``open_client``: in-process memory, shared memory of one machine, TransferQueue on Ray."""
