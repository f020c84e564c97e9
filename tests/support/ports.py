"""Reserves local TCP ports."""

import socket


def reserve() -> int:
    """Returns a port that the kernel does not assign to other sockets while this process runs.

    The port is bound with SO_REUSEPORT, so that a server that sets this option, such as JAX's coordination service
    (gRPC), can listen at it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(('', 0))
    port = reserved.getsockname()[1]
    # Keeps the socket open until the process ends.
    reserved.detach()
    return port
