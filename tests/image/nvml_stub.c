// SPDX-License-Identifier: Apache-2.0
// The part of NVML that the doctor calls, with the signatures of NVIDIA's nvml.h. What it answers comes from
// NVML_STUB: "driver;cuda version number;name|uuid|major|minor|bytes;..." with bytes 0 for "not supported".
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char name[96], uuid[96]; int major, minor; unsigned long long bytes; } Device;
typedef struct { unsigned long long total, free, used; } Memory;

static Device devices[8];
static unsigned int count;
static char driver[80];
static int cuda;

int nvmlInit_v2(void) {
    const char *text = getenv("NVML_STUB");
    if (text == NULL) return 9; // NVML_ERROR_DRIVER_NOT_LOADED
    char *copy = strdup(text), *save = NULL, *part = strtok_r(copy, ";", &save);
    snprintf(driver, sizeof driver, "%s", part);
    cuda = atoi(strtok_r(NULL, ";", &save));
    for (count = 0; (part = strtok_r(NULL, ";", &save)) != NULL && count < 8; count++) {
        Device *d = &devices[count];
        sscanf(part, "%95[^|]|%95[^|]|%d|%d|%llu", d->name, d->uuid, &d->major, &d->minor, &d->bytes);
    }
    free(copy);
    return 0;
}

int nvmlShutdown(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = cuda; return 0; }
int nvmlDeviceGetCount_v2(unsigned int *out) { *out = count; return 0; }

static int copy_text(const char *text, char *out, unsigned int length) {
    if (strlen(text) + 1 > length) return 7; // NVML_ERROR_INSUFFICIENT_SIZE
    strcpy(out, text);
    return 0;
}

int nvmlSystemGetDriverVersion(char *out, unsigned int length) { return copy_text(driver, out, length); }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) { *out = &devices[index]; return 0; }
int nvmlDeviceGetName(Device *d, char *out, unsigned int length) { return copy_text(d->name, out, length); }
int nvmlDeviceGetUUID(Device *d, char *out, unsigned int length) { return copy_text(d->uuid, out, length); }

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    *major = d->major;
    *minor = d->minor;
    return 0;
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    out->total = d->bytes;
    return d->bytes ? 0 : 3; // NVML_ERROR_NOT_SUPPORTED
}
