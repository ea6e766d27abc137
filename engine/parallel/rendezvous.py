"""How the processes of one start find each other, before there is a process group."""

import contextlib
import fcntl
import os
import socket
import struct
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from engine.errors import UserError


def check_launcher() -> None:
    """Raises `UserError` if the launcher that is to hold the processes' store has died meanwhile:
    torch would try to reach it until the timeout. (`signals.end_with_parent` cannot know if it died
    before that was called and a Python program adopts orphans here.)
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return  # then rank 0 is to hold it, later
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.suppress(OSError):  # of others, torch knows more
        try:
            socket.create_connection(address, timeout=5).close()
        except ConnectionRefusedError:
            raise UserError(
                f"torchrun is gone: nothing listens at {address[0]}:{address[1]} any more"
            ) from None


def rendezvous(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of this start, in which every process has said who it is, once all have come.

    Raises `dist.DistError` or RuntimeError after `timeout`.
    """
    shared, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(meet(shared, rank, size, timeout.total_seconds()), shared)
    store.set(f"who/{rank}", f"process {os.getpid()} on {socket.gethostname()}")
    return store


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> str:
    """Waits for all `size` processes of this start; returns a name for it that all of them get.

    torchrun keeps its store when it starts its workers again (`--max-restarts`, a host that comes
    or goes), and what the dead ones left in it makes the new ones wait for them forever
    (pytorch/pytorch#135712). So everything is kept under a name made for each start: rank 0 reads
    who is there and proposes a name, and it is taken once each of them has recognised itself and
    agreed. Raises `dist.DistError` after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    me, name = uuid.uuid4().hex, ""
    everyone: list[str] = []
    store.set(f"arrived/{rank}", me)
    while time.monotonic() < deadline:
        if rank == 0:
            arrived = [store.get(f"arrived/{r}").decode() for r in range(size)]
            if arrived != everyone:
                name, everyone = uuid.uuid4().hex, arrived
                store.set("proposal", " ".join([name, *everyone]))
            if store.check([f"{name}/agreed/{r}" for r in range(1, size)]):
                store.set(f"{name}/taken", "")
                return name
        else:
            name, *everyone = store.get("proposal").decode().split()
            if everyone[rank : rank + 1] == [me]:
                store.set(f"{name}/agreed/{rank}", "")
                if store.check([f"{name}/taken"]):
                    return name
        time.sleep(0.01)
    raise dist.DistStoreError(f"not all of {size} processes arrived")


def choose_interface(store: dist.Store, rank: int, size: int) -> None:
    """Has gloo listen where other hosts reach this one, unless GLOO_SOCKET_IFNAME says where.

    By itself it takes the address that the host's own name has: on Debian 127.0.1.1, where no other
    host finds it. Here it is the address from which this host reaches that of rank 0, or where rank
    0 is here, another host. Where none is found, nothing is changed.
    """
    own = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"address/{rank}", own)
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if own.startswith("127."):
        others = (store.get(f"address/{other}").decode() for other in range(size))
        own = address_towards(next((a for a in others if not a.startswith("127.")), own))
    for _, name in socket.if_nameindex():
        if not own.startswith("127.") and own == address_of(name):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def address_towards(host: str) -> str:
    """The IPv4 address from which this host would reach `host`; 127.0.0.1 if it would not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # asks the routing table; nothing is sent
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def address_of(interface: str) -> str | None:
    """The first IPv4 address of a network interface (Linux; elsewhere None)."""
    SIOCGIFADDR = 0x8915  # <linux/sockios.h>
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])
