"""Array mathematics without a cache: attention, quantisation, top-k, k-means, rotary embedding, and CPU kernels."""
