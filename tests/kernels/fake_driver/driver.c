// The functions of libcuda that Triton and the launcher of flash attention call. Memory is the host's. A tensor map has
// its address first, so that a test can tell it from the rest.

#include "cuda.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { FUNCTIONS = 64, PARAMETERS = 256, LAUNCHES = 256, MOST = 8192 };

static int sizes[FUNCTIONS][PARAMETERS], counts[FUNCTIONS];
static struct { long function; CUlaunchConfig config; int bytes; unsigned char parameters[MOST]; } kept[LAUNCHES];
static int launches, failing;
static long functions;
static __thread CUcontext current;  // a new thread has none

void fake_sizes(long function, int count, const int *of) {
  memcpy(sizes[function % FUNCTIONS], of, count * sizeof(int));
  counts[function % FUNCTIONS] = count;
}
void fake_forget(void) { launches = 0; }
void fake_fail(int status) { failing = status; }
int fake_launches(void) { return launches; }
// Of a launch: function, grid, threads, shared memory, stream, attributes, then the bytes of its parameters.
int fake_launch(int at, long *numbers, unsigned char *parameters) {
  CUlaunchConfig *c = &kept[at].config;
  long said[] = {kept[at].function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                 c->sharedMemBytes, (long)c->hStream, c->numAttrs};
  memcpy(numbers, said, sizeof said);
  memcpy(parameters, kept[at].parameters, kept[at].bytes);
  return kept[at].bytes;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  if (failing) return failing;
  if (launches == LAUNCHES) return 0;
  kept[launches].function = (long)function;
  kept[launches].config = *config;
  kept[launches].bytes = 0;
  for (int i = 0; i < counts[(long)function % FUNCTIONS]; ++i) {
    int size = sizes[(long)function % FUNCTIONS][i];
    memcpy(kept[launches].parameters + kept[launches].bytes, parameters[i], size);
    kept[launches].bytes += size;
  }
  ++launches;
  return 0;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes_of, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  unsigned char *bytes = (unsigned char *)map;
  memset(map, 0, sizeof *map);
  memcpy(bytes, &address, 8);
  bytes[8] = type, bytes[9] = rank, bytes[10] = swizzle, bytes[11] = fill;
  for (unsigned i = 0; i < rank; ++i) {
    memcpy(bytes + 16 + 8 * i, sizes_of + i, 8);
    memcpy(bytes + 56 + 4 * i, box + i, 4);
    if (i + 1 < rank) memcpy(bytes + 80 + 8 * i, strides + i, 8);
  }
  return 0;
}
CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
  memcpy(map, &address, 8);
  return 0;
}

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "fake"; return 0; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; return 0; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuDeviceGet(CUdevice *device, int at) { *device = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448
           : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : 65536;
  return 0;
}
CUresult cuModuleLoadData(CUmodule *module, const void *data) { *module = (CUmodule)1; return 0; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)(++functions);
  return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  *clusters = 132;
  return 0;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return 0;
}
