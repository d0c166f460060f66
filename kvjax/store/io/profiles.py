"""Flash devices, as `kvjax.store.io.emulation` has them.

A command spends `latency` in the device, beside others, then has its bytes transferred, one command after the other,
at `bandwidth` but at most `iops` commands a second. No more than `depth` commands are in the device at a time, the
others wait outside. So a caller that keeps d commands of s bytes in flight gets, with t = max(s / bandwidth, 1 / iops),

    bandwidth(s, d) = s / max(t, (latency + t) / min(d, depth))

For large s or d that is the device's bandwidth; for small s it grows linearly with s (limited by commands a second),
which is the shape of DynaKV's figure 3(b) and KVSwap's figure 2. Neither figure has its numbers in the text; where each
of ours comes from stands beside it. Writes wait as reads do, although flash writes more slowly: no source gives a rate.
"""

import dataclasses

import numpy as np

NATIVE = "native"


@dataclasses.dataclass(frozen=True)
class Profile:
    """A device.

    Attributes:
      bandwidth: bytes per second of large reads.
      iops: small commands per second, with enough of them in flight.
      latency: seconds from a command to its first byte, in an idle device.
      depth: commands the device takes at a time.
    """

    name: str
    bandwidth: float
    iops: float
    latency: float
    depth: int

    def transfer_seconds(self, size):
        """How long a command of `size` bytes keeps the others from being transferred; an array of each of several."""
        return np.maximum(size / self.bandwidth, 1 / self.iops)

    def bandwidth_at(self, size: int, depth: int) -> float:
        """Bytes per second with `depth` commands of `size` bytes always in flight."""
        transfer = self.transfer_seconds(size)
        return size / max(transfer, (self.latency + transfer) / min(depth, self.depth))


_ALL = (
    # Bandwidth: KVSwap section 4.1. IOPS: its section 2.3 says below 6 % of that at 512 bytes; 5 % is our choice, so
    # that bandwidth is reached at 10 KB. Latency: our assumption, of a TLC die and its controller. Depth: the Linux
    # driver's default.
    Profile("nvme", bandwidth=1.8e9, iops=0.05 * 1.8e9 / 512, latency=80e-6, depth=1023),
    # Bandwidth and IOPS as for nvme. Latency: our assumption. Depth: command queue of the eMMC 5.1 standard.
    Profile("emmc", bandwidth=250e6, iops=0.05 * 250e6 / 512, latency=200e-6, depth=32),
    # Bandwidth: one lane, DynaKV section 2.2. IOPS: bandwidth is reached at 24 KB, same place. Depth: "e.g., 32
    # entries", same place. Latency: our assumption.
    Profile("ufs4.0", bandwidth=2.9e9, iops=2.9e9 / 24_576, latency=100e-6, depth=32),
    # DynaKV says only that the UFS 3.1 of its oldest phone is weaker. One lane of it has half the rate of UFS 4.0
    # (HS-Gear 4 and 5); all else as for ufs4.0 is our assumption.
    Profile("ufs3.1", bandwidth=1.45e9, iops=1.45e9 / 24_576, latency=100e-6, depth=32),
)
PROFILES = {profile.name: profile for profile in _ALL}
