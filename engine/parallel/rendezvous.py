"""Rendezvous: the store through which ranks find each other before there is a process group."""

import contextlib
import hashlib
import os
import socket
import struct
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from engine.portable import fcntl


def rendezvous(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """torch's `env://`, under a prefix of this start. Raises RuntimeError after `timeout`, or sooner if torchrun has
    died.
    """
    # torchrun's own store listens before its processes start: a few seconds are enough, and one that has died is
    # noticed soon. Otherwise rank 0 opens a store. torch tries twice, and waits up to half the timeout in between.
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    connect = min(timeout, timedelta(seconds=6)) if held_by_torchrun else timeout
    store: dist.Store = next(dist.rendezvous("env://", timeout=connect))[0]
    store.set_timeout(timeout)
    return dist.PrefixStore(name_start(store, rank, size, timeout), store)


def name_start(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Agrees on a prefix for the keys of this start: the hash of a random number of each rank, once all
    ranks have seen the same numbers.

    torchrun's store outlives its processes, and gloo would connect to the addresses that they left in it: without a
    prefix, four of six restarts failed (torch 2.13.0; pytorch/pytorch#135712). Hosts do not count restarts alike.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"arrived/{rank}", uuid.uuid4().hex)
    while time.monotonic() < deadline:
        arrived = store.multi_get([f"arrived/{r}" for r in range(size)])
        name = hashlib.sha256(b"".join(arrived)).hexdigest()
        store.set(f"{name}/{rank}", "")
        if store.check([f"{name}/{r}" for r in range(size)]):
            return name
        time.sleep(0.01)
    raise dist.DistStoreError(f"not all of {size} processes arrived")


def choose_interface(store: dist.Store, rank: int, size: int) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless set, to the interface that leads to rank 0's host, or from
    there to another. gloo's own choice is the address of the host's name, which on Debian and Ubuntu
    is 127.0.1.1: no other host can reach it.
    """
    address = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address/{rank}", address)
    if address.startswith("127."):  # this is rank 0's host
        others = (store.get(f"address/{other}").decode() for other in range(size))
        address = address_towards(next((a for a in others if not a.startswith("127.")), address))
    for _, name in socket.if_nameindex():
        if name != "lo" and has_address(name, address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_towards(host: str) -> str:
    """The IPv4 address from which this host would reach `host`; 127.0.0.1 without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((host, 9))  # looks up the route; nothing is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


def has_address(interface: str, address: str) -> bool:
    """Whether `address` is the first IPv4 address of a network interface (Linux)."""
    SIOCGIFADDR = 0x8915  # <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return answer[20:24] == socket.inet_aton(address)
    return False
