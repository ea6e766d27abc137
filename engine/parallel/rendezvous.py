"""Rendezvous: the store through which ranks find each other before there is a process group."""

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
    """The store of this start, with the process id and host of each rank. Raises RuntimeError after
    `timeout`, or sooner if torchrun has died.
    """
    # torchrun's own store listens before its processes start: a few seconds are enough, and one that has died is
    # noticed soon. Otherwise rank 0 opens a store. torch tries twice, and waits up to half the timeout in between.
    held_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    connect = min(timeout, timedelta(seconds=6)) if held_by_torchrun else timeout
    store: dist.Store = next(dist.rendezvous("env://", timeout=connect))[0]
    store.set_timeout(timeout)
    store = dist.PrefixStore(name_start(store, rank, size, timeout), store)
    store.set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
    return store


def name_start(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Agrees on a prefix for the keys of this start: the hash of a random number of each rank, once all
    ranks have seen the same numbers.

    torchrun's store outlives its processes, and what they left in it would mislead those that replace
    them (pytorch/pytorch#135712; hosts do not count restarts alike).
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
    addresses = [store.get(f"address/{other}").decode() for other in range(size)]
    if address.startswith("127."):  # this is rank 0's host
        address = address_towards(next((a for a in addresses if not a.startswith("127.")), address))
    for _, name in socket.if_nameindex():
        if name != "lo" and address_of(name) == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def address_towards(host: str) -> str:
    """The IPv4 address from which this host would reach `host`; 127.0.0.1 without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # looks up the route; nothing is sent
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def address_of(interface: str) -> str | None:
    """The first IPv4 address of a network interface (Linux; None if it has none)."""
    SIOCGIFADDR = 0x8915  # <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
