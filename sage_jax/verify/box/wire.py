"""Length-framed JSON with descriptors beside it, between trusted processes over one socket."""

import _socket  # the public module wraps every number in an enumeration
import array
import json
import struct


def send(sock, message, descriptors=()):
    text = json.dumps(message).encode()
    frame = struct.pack(">I", len(text)) + text
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", descriptors))
    sent = sock.sendmsg([frame], [rights]) if descriptors else 0
    sock.sendall(frame[sent:])


def receive(sock):
    """One message and its descriptors; (None, []) when the peer is gone."""
    descriptors = array.array("i")
    text = b""
    while (size := frame_size(text)) is None or len(text) < size:
        part, ancillary, _, _ = sock.recvmsg(1 << 16, _socket.CMSG_SPACE(8 * 4))
        if not part:
            return None, []
        for level, kind, data in ancillary:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % 4])
        text += part
    return json.loads(text[4:]), list(descriptors)


def frame_size(text):
    """Bytes of the frame that begins with ``text``, None while its length is not known."""
    return 4 + struct.unpack(">I", text[:4])[0] if len(text) >= 4 else None
