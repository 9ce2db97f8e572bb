/* A stand-in for NVIDIA's libnvidia-ml.so.1: eight GPUs whose readings change with each call.

   For measuring monitors that read NVML on a machine that has none (`benchmarks/ui.py --peers`). Signatures and
   structs are those of NVIDIA's documented API, as the package nvidia-ml-py declares them; functions that are not
   here are answered by that package as not found. */

#include <stdio.h>
#include <string.h>

#define GPUS 8
#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

typedef struct { int index; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned int gpu, memory; } Utilization;

static Device devices[GPUS];
static unsigned int readings;
static const unsigned long long TOTAL = 143771ull << 20;

static unsigned int moving(const Device *device, unsigned int from, unsigned int span)
{
    return from + (readings++ * 7 + (unsigned int)device->index * 13) % span;
}

EXPORT int nvmlInit_v2(void)
{
    for (int index = 0; index < GPUS; index++) devices[index].index = index;
    return SUCCESS;
}
EXPORT int nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned int size)
{
    snprintf(text, size, "570.00");
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return SUCCESS; }
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned int *count) { *count = GPUS; return SUCCESS; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device)
{
    if (index >= GPUS) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetIndex(Device *device, unsigned int *index)
{
    *index = (unsigned int)device->index;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetName(Device *device, char *text, unsigned int size)
{
    (void)device;
    snprintf(text, size, "NVIDIA H200");
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUUID(Device *device, char *text, unsigned int size)
{
    snprintf(text, size, "GPU-00000000-0000-0000-0000-%012d", device->index);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory)
{
    memory->total = TOTAL;
    memory->used = (unsigned long long)moving(device, 90000, 20000) << 20;
    memory->free = TOTAL - memory->used;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory)
{
    Memory plain;
    nvmlDeviceGetMemoryInfo(device, &plain);
    memory->total = plain.total;
    memory->reserved = 0;
    memory->used = plain.used;
    memory->free = plain.free;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates)
{
    rates->gpu = moving(device, 60, 40);
    rates->memory = moving(device, 30, 30);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetTemperature(Device *device, unsigned int sensor, unsigned int *celsius)
{
    (void)sensor;
    *celsius = moving(device, 50, 20);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts)
{
    *milliwatts = moving(device, 400000, 250000);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned int *milliwatts)
{
    (void)device;
    *milliwatts = 700000;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetPowerManagementLimit(Device *device, unsigned int *milliwatts)
{
    return nvmlDeviceGetEnforcedPowerLimit(device, milliwatts);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned int *count, void *processes)
{
    (void)device;
    (void)processes;
    *count = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned int *count, void *processes)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, processes);
}
EXPORT int nvmlDeviceGetPersistenceMode(Device *device, unsigned int *mode) { (void)device; *mode = 1; return SUCCESS; }
EXPORT int nvmlDeviceGetPerformanceState(Device *device, unsigned int *state) { (void)device; *state = 0; return SUCCESS; }

/* What monitors ask for and get no figure of, as on many a real GPU. */
#define WITHOUT(name) EXPORT int name(void) { return NOT_SUPPORTED; }
WITHOUT(nvmlDeviceGetComputeMode)
WITHOUT(nvmlDeviceGetDecoderUtilization)
WITHOUT(nvmlDeviceGetDisplayActive)
WITHOUT(nvmlDeviceGetDriverModel)
WITHOUT(nvmlDeviceGetDriverModel_v2)
WITHOUT(nvmlDeviceGetEncoderUtilization)
WITHOUT(nvmlDeviceGetFanSpeed)
WITHOUT(nvmlDeviceGetMigMode)
WITHOUT(nvmlDeviceGetPciInfo_v3)
WITHOUT(nvmlDeviceGetTotalEccErrors)
