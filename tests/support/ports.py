"""TCP ports of this machine that stay free for whom they were chosen."""

import socket


def reserve() -> int:
    """A port that the kernel gives to nobody who asks for any port, and at which who knows it can listen.

    It is bound, and not listened at, until this process ends. JAX's coordination service shares ports (gRPC sets
    SO_REUSEPORT).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(('', 0))
    port = held.getsockname()[1]
    # Kept open by nobody's reference: the kernel closes it with the process.
    held.detach()
    return port
