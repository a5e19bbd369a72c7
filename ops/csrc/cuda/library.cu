// What the library says of itself, and of CUDA's errors.

#include "elements.cuh"

EXPORTED int ops_abi() { return shardlight::kAbi; }

EXPORTED const char* cuda_error_name(int error) { return cudaGetErrorName(cudaError_t(error)); }
EXPORTED const char* cuda_error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }
