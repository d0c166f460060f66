"""Profiles of flash devices, which `kvjax.store.io.emulation` emulates.

A command spends `latency` in the device, in parallel with others; then its bytes are transferred, one command after the
other, at `bandwidth` but at most `iops` commands per second. No more than `depth` commands are in the device at a time;
the others wait outside. So a caller that keeps d commands of s bytes in flight gets, with t = max(s / bandwidth,
1 / iops),

    bandwidth(s, d) = s / max(t, (latency + t) / min(d, depth))

For large s or d this is the device's bandwidth; for small s it grows linearly with s (limited by commands per second),
which is the shape of DynaKV's figure 3(b) and KVSwap's figure 2. Neither paper gives the numbers of its figure in the
text; the source of each number is beside it. Writes take as long as reads, although flash writes more slowly: no source
gives a rate.
"""

import dataclasses

import numpy as np

NATIVE = "native"


@dataclasses.dataclass(frozen=True)
class Profile:
    """A device.

    Attributes:
      name: its name, for `FlashStore(profile=...)`.
      bandwidth: bytes per second of large reads.
      iops: small commands per second, with enough of them in flight.
      latency: seconds from a command to its first byte, in an idle device.
      depth: commands that the device takes at a time.
    """

    name: str
    bandwidth: float
    iops: float
    latency: float
    depth: int

    def transfer_seconds(self, size):
        """Returns how long the transfer of a command of `size` bytes occupies the device, in seconds; an array for an
        array of sizes."""
        return np.maximum(size / self.bandwidth, 1 / self.iops)

    def bandwidth_at(self, size: int, depth: int) -> float:
        """Returns the bytes per second with `depth` commands of `size` bytes always in flight."""
        transfer = self.transfer_seconds(size)
        return size / max(transfer, (self.latency + transfer) / min(depth, self.depth))


_ALL = (
    # Bandwidth: KVSwap section 4.1. IOPS: its section 2.3 says below 6 % of the bandwidth at 512 bytes; 5 % is our
    # choice, so that the full bandwidth is reached at 10 KB. Latency: our assumption for a TLC die and its controller.
    # Depth: the Linux driver's default.
    Profile("nvme", bandwidth=1.8e9, iops=0.05 * 1.8e9 / 512, latency=80e-6, depth=1023),
    # Bandwidth and IOPS as for nvme. Latency: our assumption. Depth: command queue of the eMMC 5.1 standard.
    Profile("emmc", bandwidth=250e6, iops=0.05 * 250e6 / 512, latency=200e-6, depth=32),
    # Bandwidth: one lane, DynaKV section 2.2. IOPS: the full bandwidth is reached at 24 KB, same section. Depth: "e.g.,
    # 32 entries", same section. Latency: our assumption.
    Profile("ufs4.0", bandwidth=2.9e9, iops=2.9e9 / 24_576, latency=100e-6, depth=32),
    # DynaKV says only that the UFS 3.1 of its oldest phone is weaker. One lane has half the rate of UFS 4.0 (HS-Gear 4
    # and 5); that everything else equals ufs4.0 is our assumption.
    Profile("ufs3.1", bandwidth=1.45e9, iops=1.45e9 / 24_576, latency=100e-6, depth=32),
)
PROFILES = {profile.name: profile for profile in _ALL}
