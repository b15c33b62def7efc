# SPDX-License-Identifier: Apache-2.0
"""Who may ask: the names that a request may be addressed to, and the token where the page is open to other machines."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_ANY = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a server on this host accepts. Without a token everybody who reaches it on this machine may read."""

    host: str
    token: str | None

    @classmethod
    def at(cls, host: str) -> Access:
        """Of a new server. One that other machines can reach gets a new token."""
        return cls(host=host, token=None if is_loopback(host) else secrets.token_urlsafe(24))

    def allows_name(self, header: str | None) -> bool:
        """Whether the Host header names this server. A page of another site that resolves its own name to this machine
        sends that name, and is refused. With a token any name is fine: other sites do not know the token."""
        if self.token is not None:
            return True
        name = _host_of(header or "")
        return name in _LOCAL_NAMES or name == self.host.lower()

    def allows_token(self, given: str | None) -> bool:
        """Whether this is the token; compared in constant time."""
        if self.token is None:
            return True
        return hmac.compare_digest((given or "").encode("utf-8", "replace"), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on this host."""
    if host in _ANY:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_of(header: str) -> str:
    """Without the port; the address in brackets of IPv6 without them."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdigit() else header
