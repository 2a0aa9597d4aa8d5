/* A stand-in for NVIDIA's management library, for tests of the energy meter through the real nvidia-ml-py.
 *
 * Build: cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c
 * The environment variable STANDIN_FAULTS holds the names of faults, separated by spaces; it is read at every call.
 * The board draws 250 W all the time.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15, MISMATCH = 18, UNKNOWN = 999 };

static int has(const char *fault) {
    const char *faults = getenv("STANDIN_FAULTS");
    return faults != NULL && strstr(faults, fault) != NULL;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static const unsigned milliwatts = 250000;
static double used_mj, read_at;

int nvmlInitWithFlags(unsigned flags) { return has("version-mismatch") ? MISMATCH : has("init-unknown") ? UNKNOWN : OK; }
int nvmlShutdown(void) { return has("shutdown-fails") ? LOST : OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case LOST: return "GPU is lost";
    case MISMATCH: return has("bad-error-text") ? "\xff\xfe" : "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-11111111-2222-3333-4444-555555555555") != 0) return NOT_FOUND;
    *handle = (void *)1;
    return OK;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    if (has("name-unknown")) return UNKNOWN;
    strncpy(name, has("name-latin1") ? "Grafikbeschleuniger f\xfcr B\xfcros" : has("name-control") ? "GPU \x1b[2J\x07" : "Stand-in GPU", size);
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = has("slices");
    return has("mig-unsupported") ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    if (has("no-counter")) return NOT_SUPPORTED;
    if (has("energy-forbidden")) return NO_PERMISSION;
    if (has("device-lost")) return LOST;
    if (has("counter-resets")) { /* at each reading the driver was loaded later */
        static unsigned resets;
        *millijoules = 1000000000ull - 1000 * resets++;
        return OK;
    }
    double now = seconds();
    if (read_at > 0 && !has("counter-stands")) used_mj += (now - read_at) * milliwatts;
    read_at = now;
    *millijoules = 1000000000ull + (unsigned long long)used_mj;
    return OK;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    static unsigned read;
    if (has("no-temperature")) return NOT_SUPPORTED;
    *celsius = 40 + read++;
    return sensor == 0 ? OK : NOT_FOUND;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *power) {
    if (has("no-power")) return NOT_SUPPORTED;
    *power = milliwatts;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = 8, *minor = 0;
    return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    *reasons = has("throttled") ? 0x40 : 0;
    return OK;
}
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    *reasons = has("throttled") ? 0x40 : 0;
    return OK;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;

static int list(unsigned pid, unsigned *count, Process *processes) {
    if (has("no-processes")) return NOT_SUPPORTED;
    unsigned room = *count;
    *count = pid != 0;
    if (pid == 0) return OK;
    if (room < 1 || processes == NULL) return TOO_SMALL;
    processes[0] = (Process){pid, 1 << 20, ~0u, ~0u};
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    return list(has("in-container") ? 4242 : (unsigned)getpid(), count, processes);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    return list(has("desktop") ? 77 : 0, count, processes);
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    strncpy(version, has("driver-latin1") ? "570\xb7" : "570.1", size);
    return OK;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *limit) { *limit = 300000; return OK; }
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *clock) { *clock = 1400; return OK; }
int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *clock) { *clock = 1500; return OK; }
