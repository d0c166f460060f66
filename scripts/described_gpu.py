"""An NVIDIA H100 as XLA's compiler for GPUs takes it, which needs JAX's CUDA plugin and no GPU."""

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from kvjax.ops import kernels
from scripts import described

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def sharding() -> jax.sharding.NamedSharding:
    """Returns the sharding of arrays on the described GPU, for which JAX compiles from then on.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    known = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name == "gpu" else known(name)
    # JAX and kvjax ask the device and the library what they can; these are the description's, 9.7.
    kernels.capability = lambda: (9, 0)
    cudnn.check_cudnn_version, cudnn.check_compute_capability = lambda: 90_700, lambda capability: True
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100)
    described.compile_without_a_device("gpu", topology.devices[0].client)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(topology.devices), ("x",)), jax.P())
