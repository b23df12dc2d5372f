/* A fake libnvidia-ml.so.1: it answers from a scenario file, so that hangwatch and the real pynvml run unchanged.
 *
 * The file is named by FAKE_NVML_SCENARIO and read again whenever it changes. Each line is a key and a value:
 *
 *     gpus 8
 *     driver_version 570.86.15
 *     gpu all power_limit_watts 700
 *     gpu 3 power_watts 650 95@1700000000     650 W, from that Unix time on 95 W
 *     gpu 3 pids 4711 4712
 *     gpu 3 fault nvmlDeviceGetPowerUsage 15  that call answers this NVML error
 *     gpu 3 fault all 15                      every call about this GPU does
 *     gpu 3 fault nvmlDeviceGetName sleep     the call never returns; "crash" is SIGSEGV, "slow" takes 0.3 s
 *     fault nvmlInitWithFlags 9
 *     xid 1 3 79                              the first XID to tell: GPU 3, number 79
 *     gpu 0 link 4 state 0
 *     gpu 0 peer 1 p2p 2 0                    cap 2 (NVLINK) between GPU 0 and 1 answers 0 (OK)
 *     gpu 0 field 230 1                       NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
 *     gpu 0 field 197 5e6/s                   a counter that grows by so much a second
 *     gpu 0 field_type 197 1                  its nvmlValueType_t, where it is not 3 (64 bits)
 *     gpu 0 field_error 197 999               the NVML error of this field alone
 *     gpu 0 gpm 2 12.5                        NVML_GPM_METRIC_SM_UTIL, in percent; a GPU without any has no GPM
 *     gpu 0 link 4 field 214 2                NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS of that link
 *
 * "all" stands for any word of a key, and the last line that fits wins. What no line gives is NOT_SUPPORTED, as it is
 * on a GPU that does not have it. Units are the words in the keys; the library converts to NVML's.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10 };
enum { MAX_GPUS = 64 };

typedef struct { int index; } Gpu;
typedef unsigned int uint;
typedef unsigned long long u64;

static Gpu gpus[MAX_GPUS];
static char *scenario;
static struct stat scenario_stat;

/* --- the scenario file ----------------------------------------------------------------------------------------- */

static void load(void)
{
    const char *path = getenv("FAKE_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now) != 0) {
        free(scenario);
        scenario = NULL;
        return;
    }
    if (scenario && now.st_ino == scenario_stat.st_ino && now.st_size == scenario_stat.st_size
        && now.st_mtim.tv_sec == scenario_stat.st_mtim.tv_sec && now.st_mtim.tv_nsec == scenario_stat.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    free(scenario);
    scenario = calloc(1, (size_t)now.st_size + 1);
    if (fread(scenario, 1, (size_t)now.st_size, file) != (size_t)now.st_size)
        fprintf(stderr, "fake nvml: short read of %s\n", path);
    fclose(file);
    scenario_stat = now;
}

/* Past the words of `key` in `line`, or NULL when they differ; "all" in the line fits any word. */
static const char *after_key(const char *line, const char *key)
{
    while (*key) {
        size_t want = strcspn(key, " "), have = strcspn(line, " \n");
        int any = have == 3 && strncmp(line, "all", 3) == 0;
        if (!any && (want != have || strncmp(line, key, want) != 0))
            return NULL;
        key += want + (key[want] == ' ');
        line += have;
        while (*line == ' ')
            line++;
    }
    return line;
}

/* The value of the last line that fits the key, copied to `value`; 0 when there is none. */
static int find(char *value, size_t size, const char *format, ...)
{
    char key[200];
    va_list words;
    va_start(words, format);
    vsnprintf(key, sizeof key, format, words);
    va_end(words);
    load();
    int found = 0;
    for (const char *line = scenario; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        const char *rest = after_key(line, key);
        if (rest) {
            snprintf(value, size, "%.*s", (int)strcspn(rest, "\n"), rest);
            found = 1;
        }
    }
    return found;
}

/* "650 95@1700000000": the last number whose time has come. "5e6/s": a counter that began to grow in 1970. */
static double by_time(char *value)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double seconds = (double)now.tv_sec + (double)now.tv_nsec / 1e9, number = 0;
    for (char *word = strtok(value, " "); word; word = strtok(NULL, " ")) {
        char *end;
        double candidate = strtod(word, &end);
        if (strcmp(end, "/s") == 0)
            candidate *= seconds;
        if (*end != '@' || strtod(end + 1, NULL) <= seconds)
            number = candidate;
    }
    return number;
}

static int answer(const char *action)
{
    if (strcmp(action, "sleep") == 0)
        for (;;)
            pause();
    if (strcmp(action, "crash") == 0)
        kill(getpid(), SIGSEGV);
    if (strcmp(action, "slow") == 0)
        usleep(300000);
    return atoi(action);
}

/* The code that a call about a GPU answers; 0 when the scenario lets it through. */
static int fault(Gpu *gpu, const char *call)
{
    char action[64];
    return find(action, sizeof action, "gpu %d fault %s", gpu->index, call) ? answer(action) : SUCCESS;
}

static int system_fault(const char *call)
{
    char action[64];
    return find(action, sizeof action, "fault %s", call) ? answer(action) : SUCCESS;
}

static int number(Gpu *gpu, const char *call, double *out, const char *format, ...)
{
    char key[120], value[400];
    int code = fault(gpu, call);
    if (code)
        return code;
    va_list words;
    va_start(words, format);
    vsnprintf(key, sizeof key, format, words);
    va_end(words);
    if (!find(value, sizeof value, "gpu %d %s", gpu->index, key))
        return NOT_SUPPORTED;
    *out = by_time(value);
    return SUCCESS;
}

static double number_or_zero(Gpu *gpu, const char *key)
{
    char value[400];
    return find(value, sizeof value, "gpu %d %s", gpu->index, key) ? by_time(value) : 0;
}

static int text(Gpu *gpu, const char *call, char *out, uint size, const char *key)
{
    int code = fault(gpu, call);
    if (code)
        return code;
    return find(out, size, "gpu %d %s", gpu->index, key) ? SUCCESS : NOT_SUPPORTED;
}

/* A call whose answer is one number of the scenario, in NVML's unit after the factor. */
#define NUMBER(CALL, TYPE, KEY, FACTOR)                        \
    int CALL(Gpu *gpu, TYPE *out)                              \
    {                                                          \
        double value;                                          \
        int code = number(gpu, #CALL, &value, KEY);            \
        if (code == SUCCESS)                                   \
            *out = (TYPE)(value * (FACTOR) + 0.5);             \
        return code;                                           \
    }

/* --- system ---------------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(uint flags)
{
    (void)flags;
    int code = system_fault("nvmlInitWithFlags");
    load();
    return code ? code : scenario ? SUCCESS : DRIVER_NOT_LOADED;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code)
{
    static char words[40];
    snprintf(words, sizeof words, "fake error %d", code);
    return words;
}

int nvmlSystemGetDriverVersion(char *out, uint size)
{
    int code = system_fault("nvmlSystemGetDriverVersion");
    return code ? code : find(out, size, "driver_version") ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    char value[20];
    int code = system_fault("nvmlSystemGetCudaDriverVersion_v2");
    if (!code && !find(value, sizeof value, "cuda_driver_version"))
        return NOT_SUPPORTED;
    *out = code ? 0 : atoi(value);
    return code;
}

int nvmlDeviceGetCount_v2(uint *count)
{
    char value[20];
    int code = system_fault("nvmlDeviceGetCount_v2");
    *count = find(value, sizeof value, "gpus") ? (uint)atoi(value) : 0;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, Gpu **out)
{
    uint count = 0;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count || index >= MAX_GPUS)
        return INVALID_ARGUMENT;
    gpus[index].index = (int)index;
    *out = &gpus[index];
    return fault(*out, "nvmlDeviceGetHandleByIndex_v2");
}

/* --- one GPU: what is sampled ------------------------------------------------------------------------------------ */

int nvmlDeviceGetName(Gpu *gpu, char *out, uint size) { return text(gpu, __func__, out, size, "name"); }
int nvmlDeviceGetVbiosVersion(Gpu *gpu, char *out, uint size) { return text(gpu, __func__, out, size, "vbios"); }
int nvmlDeviceGetInforomImageVersion(Gpu *gpu, char *out, uint size) { return text(gpu, __func__, out, size, "inforom"); }
int nvmlDeviceGetUUID(Gpu *gpu, char *out, uint size) { return text(gpu, __func__, out, size, "uuid"); }
NUMBER(nvmlDeviceGetPowerUsage, uint, "power_watts", 1000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, uint, "power_limit_watts", 1000)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, "energy_joules", 1000)

int nvmlDeviceGetTemperature(Gpu *gpu, uint sensor, uint *out)
{
    double value;
    int code = number(gpu, __func__, &value, "temperature_celsius");
    if (code == SUCCESS)
        *out = (uint)value;
    return sensor == 0 ? code : NOT_SUPPORTED;
}

int nvmlDeviceGetClockInfo(Gpu *gpu, uint clock, uint *out)
{
    double value;
    int code = number(gpu, __func__, &value, clock == 1 ? "sm_clock_hertz" : "memory_clock_hertz");
    if (code == SUCCESS)
        *out = (uint)(value / 1e6 + 0.5);
    return code;
}

typedef struct { uint gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *out)
{
    double value;
    int code = number(gpu, __func__, &value, "utilization_ratio");
    if (code == SUCCESS) {
        out->gpu = (uint)(value * 100 + 0.5);
        out->memory = 0;
    }
    return code;
}

typedef struct { u64 total, free, used; } Memory;

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *out)
{
    double total;
    int code = number(gpu, __func__, &total, "memory_total_bytes");
    if (code == SUCCESS) {
        out->total = (u64)total;
        out->used = (u64)number_or_zero(gpu, "memory_used_bytes");
        out->free = out->total - out->used;
    }
    return code;
}

typedef struct { uint version; u64 total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, MemoryV2 *out)
{
    Memory whole;
    int code = fault(gpu, __func__);
    code = code ? code : nvmlDeviceGetMemoryInfo(gpu, &whole);
    if (code == SUCCESS) {
        out->total = whole.total;
        out->reserved = (u64)number_or_zero(gpu, "memory_reserved_bytes");
        out->free = whole.free;
        out->used = whole.used - out->reserved;
    }
    return code;
}

typedef struct { uint pid; u64 memory; uint gpu_instance, compute_instance; } Process;

static int processes(Gpu *gpu, const char *call, const char *key, uint *count, Process *out)
{
    char value[2000] = "";
    uint room = *count, used = 0;
    int code = text(gpu, call, value, sizeof value, key);
    if (code && code != NOT_SUPPORTED)
        return code;
    for (char *word = strtok(value, " "); word; word = strtok(NULL, " "), used++)
        if (out && used < room)
            out[used] = (Process){(uint)atoi(word), 1ULL << 30, 0, 0};
    *count = used;
    return used > room || (used && !out) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, uint *count, Process *out)
{
    return processes(gpu, __func__, "pids", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, uint *count, Process *out)
{
    return processes(gpu, __func__, "graphics_pids", count, out);
}

/* --- one GPU: links, bus, health --------------------------------------------------------------------------------- */

NUMBER(nvmlDeviceGetPersistenceMode, uint, "persistence_mode", 1)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "clocks_event_reasons", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, uint, "pcie_generation_max", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, uint, "pcie_generation", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, uint, "pcie_width_max", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, uint, "pcie_width", 1)
NUMBER(nvmlDeviceGetPcieReplayCounter, uint, "pcie_replays", 1)
NUMBER(nvmlDeviceGetNumaNodeId, int, "gpu_numa_node", 1)

int nvmlDeviceGetPcieThroughput(Gpu *gpu, uint counter, uint *out)
{
    double value;
    int code = number(gpu, __func__, &value, "pcie_bytes_per_second %u", counter);
    if (code == SUCCESS)
        *out = (uint)(value / 1e3);
    return code;
}

int nvmlDeviceGetMigMode(Gpu *gpu, uint *current, uint *pending)
{
    double value;
    int code = number(gpu, __func__, &value, "mig_mode");
    if (code == SUCCESS)
        *current = *pending = (uint)value;
    return code;
}

NUMBER(nvmlDeviceGetMaxMigDeviceCount, uint, "mig_instances", 1)

/* Instance 3 of GPU 2 has the lines of "gpu 1023". */
int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, uint index, Gpu **out)
{
    static Gpu instances[MAX_GPUS][10];
    char value[400];
    *out = &instances[gpu->index][index];
    (*out)->index = 1000 + 10 * gpu->index + (int)index;
    return find(value, sizeof value, "gpu %d uuid", (*out)->index) ? SUCCESS : NOT_SUPPORTED;
}

typedef struct {
    char legacy_id[16];
    uint domain, bus, device, pci_device_id, pci_subsystem_id;
    char id[32];
} Pci;

static int pci(Gpu *gpu, const char *call, const char *key, Pci *out)
{
    char id[32];
    int code = text(gpu, call, id, sizeof id, key);
    if (code)
        return code;
    memset(out, 0, sizeof *out);
    sscanf(id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->id, sizeof out->id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
    snprintf(out->legacy_id, sizeof out->legacy_id, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff, out->device & 0xff);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) { return pci(gpu, __func__, "pci_bus_id", out); }

int nvmlDeviceGetCpuAffinity(Gpu *gpu, uint words, unsigned long *out)
{
    char value[400];
    int code = text(gpu, __func__, value, sizeof value, "cpu_affinity"); /* "0-3 8-11" */
    if (code)
        return code;
    memset(out, 0, words * sizeof *out);
    for (char *word = strtok(value, " "); word; word = strtok(NULL, " ")) {
        uint first, last;
        if (sscanf(word, "%u-%u", &first, &last) != 2)
            last = first = (uint)atoi(word);
        for (uint cpu = first; cpu <= last && cpu / 64 < words; cpu++)
            out[cpu / 64] |= 1UL << (cpu % 64);
    }
    return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(Gpu *gpu, uint words, unsigned long *out, uint scope)
{
    double node;
    int code = number(gpu, __func__, &node, "numa_node");
    (void)scope;
    if (code)
        return code;
    memset(out, 0, words * sizeof *out);
    out[(uint)node / 64] |= 1UL << ((uint)node % 64);
    return SUCCESS;
}

#define LINK(CALL, KEY)                                              \
    int CALL(Gpu *gpu, uint link, uint *out)                         \
    {                                                                \
        double value;                                                \
        int code = number(gpu, #CALL, &value, "link %u " KEY, link); \
        if (code == SUCCESS)                                         \
            *out = (uint)value;                                      \
        return code;                                                 \
    }
LINK(nvmlDeviceGetNvLinkState, "state")
LINK(nvmlDeviceGetNvLinkVersion, "version")
LINK(nvmlDeviceGetNvLinkRemoteDeviceType, "remote_type")

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, uint link, Pci *out)
{
    char key[40];
    snprintf(key, sizeof key, "link %u remote", link);
    return pci(gpu, __func__, key, out);
}

int nvmlDeviceGetNvLinkErrorCounter(Gpu *gpu, uint link, uint counter, u64 *out)
{
    double value;
    int code = number(gpu, __func__, &value, "link %u errors %u", link, counter);
    if (code == SUCCESS)
        *out = (u64)value;
    return code;
}

static int pair(Gpu *gpu, Gpu *other, const char *call, const char *key, uint *out)
{
    double value;
    int code = fault(other, call);
    if (code == SUCCESS)
        code = number(gpu, call, &value, "peer %d %s", other->index, key);
    if (code == SUCCESS)
        *out = (uint)value;
    return code;
}

int nvmlDeviceGetP2PStatus(Gpu *gpu, Gpu *other, uint index, uint *out)
{
    char key[20];
    snprintf(key, sizeof key, "p2p %u", index);
    return pair(gpu, other, __func__, key, out);
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu *gpu, Gpu *other, uint *out)
{
    return pair(gpu, other, __func__, "topology", out);
}

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, uint type, uint counter, u64 *out)
{
    double value;
    int code = number(gpu, __func__, &value, "ecc %s %s", type == 1 ? "uncorrected" : "corrected", counter == 1 ? "aggregate" : "volatile");
    if (code == SUCCESS)
        *out = (u64)value;
    return code;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, uint *correctable, uint *uncorrectable, uint *pending, uint *failed)
{
    char value[80];
    int code = text(gpu, __func__, value, sizeof value, "remapped_rows"); /* four numbers */
    if (code == SUCCESS && sscanf(value, "%u %u %u %u", correctable, uncorrectable, pending, failed) != 4)
        return NOT_SUPPORTED;
    return code;
}

typedef struct {
    uint version;
    unsigned char cluster_uuid[16];
    uint status, clique_id;
    unsigned char state;
    uint health_mask;
    unsigned char health_summary;
} FabricInfo;

int nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, FabricInfo *out)
{
    double state;
    int code = number(gpu, __func__, &state, "fabric state");
    if (code)
        return code;
    out->state = (unsigned char)state;
    out->status = (uint)number_or_zero(gpu, "fabric status");
    out->health_mask = (uint)number_or_zero(gpu, "fabric health_mask");
    out->clique_id = (uint)number_or_zero(gpu, "fabric clique");
    return SUCCESS;
}

/* --- XIDs ------------------------------------------------------------------------------------------------------ */

typedef struct { Gpu *gpu; u64 type, data; uint gpu_instance, compute_instance; } Event;

static int registered[MAX_GPUS];

int nvmlEventSetCreate(void **set)
{
    *set = registered;
    return system_fault("nvmlEventSetCreate");
}

int nvmlEventSetFree(void *set)
{
    memset(set, 0, sizeof registered);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Gpu *gpu, u64 types, void *set)
{
    int code = fault(gpu, __func__);
    if (code == SUCCESS && set == registered)
        registered[gpu->index] = (types & 0x8) != 0;
    return code;
}

int nvmlEventSetWait_v2(void *set, Event *out, uint milliseconds)
{
    static int told;
    char value[40];
    int index;
    (void)set, (void)milliseconds;
    int code = system_fault("nvmlEventSetWait_v2");
    if (code)
        return code;
    while (find(value, sizeof value, "xid %d", told + 1)) {
        told++;
        if (sscanf(value, "%d %llu", &index, &out->data) == 2 && registered[index]) {
            out->gpu = &gpus[index];
            out->type = 0x8;
            return SUCCESS;
        }
    }
    return TIMEOUT;
}

/* --- field values ---------------------------------------------------------------------------------------------- */

typedef struct {
    uint field, scope;
    int64_t timestamp, latency;
    uint type, code;
    union { double d; u64 ull; } value;
} FieldValue;

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, FieldValue *values)
{
    int code = fault(gpu, __func__);
    for (int i = 0; i < count && !code; i++) {
        double value = 0;
        values[i].code = (uint)number(gpu, __func__, &value, "field %u", values[i].field);
        if (values[i].code == NOT_SUPPORTED) /* a field of one NVLink */
            values[i].code = (uint)number(gpu, __func__, &value, "link %u field %u", values[i].scope, values[i].field);
        char given[20];
        if (find(given, sizeof given, "gpu %d field_error %u", gpu->index, values[i].field))
            values[i].code = (uint)atoi(given);
        int typed = find(given, sizeof given, "gpu %d field_type %u", gpu->index, values[i].field);
        values[i].type = typed ? (uint)atoi(given) : 3; /* NVML_VALUE_TYPE_UNSIGNED_LONG_LONG */
        values[i].value.ull = (u64)value;
    }
    return code;
}

/* --- GPM: a sample remembers its GPU, and that it was taken ------------------------------------------------------ */

typedef struct { Gpu *gpu; int taken; } GpmSample;
typedef struct {
    uint id, code;
    double value;
    char *names[3];
} GpmMetric;
typedef struct {
    uint version, count;
    GpmSample *first, *last;
    GpmMetric metrics[];
} GpmQuestion;

int nvmlGpmQueryDeviceSupport(Gpu *gpu, uint *version_and_answer)
{
    double value;
    int code = fault(gpu, __func__);
    if (version_and_answer[0] != 1)
        return INVALID_ARGUMENT;
    version_and_answer[1] = number(gpu, __func__, &value, "gpm 2") == SUCCESS;
    return code;
}

int nvmlGpmSampleAlloc(GpmSample **out)
{
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

int nvmlGpmSampleGet(Gpu *gpu, GpmSample *sample)
{
    *sample = (GpmSample){ gpu, 1 };
    return fault(gpu, __func__);
}

int nvmlGpmMetricsGet(GpmQuestion *asked)
{
    if (asked->version != 1 || asked->first == asked->last || !asked->first->taken || !asked->last->taken
        || asked->first->gpu != asked->last->gpu)
        return INVALID_ARGUMENT;
    for (uint i = 0; i < asked->count; i++)
        asked->metrics[i].code =
            (uint)number(asked->last->gpu, __func__, &asked->metrics[i].value, "gpm %u", asked->metrics[i].id);
    return SUCCESS;
}
