#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS = 2 * TABLE_LIMIT, WORDS = sizeof(Key) / 8 };

_Static_assert(sizeof(Key) == 136 && sizeof(Key) % 8 == 0, "a key has no padding: it is compared byte by byte");

static uint64_t mixed(uint64_t x) {
    x ^= x >> 32;
    x *= 0x9e3779b97f4a7c15u;
    return x ^ (x >> 29);
}

static uint32_t first_slot(const Key *key) {
    uint64_t words[WORDS], hash = 0;
    memcpy(words, key, sizeof words);
    for (int i = 0; i < WORDS; i++) hash = (hash ^ words[i]) * 0x9e3779b97f4a7c15u + (hash >> 31);
    return (uint32_t)(mixed(hash) % SLOTS);
}

int table_open(Table *table) {
    table->count = table->lent_count = table->lent_next = 0;
    table->serial = 0;
    table->slots = calloc(SLOTS, sizeof *table->slots);
    // Aligned as the maps in it must be; owner 0 is nobody's.
    table->maps = aligned_alloc(64, MAP_SLOTS * sizeof *table->maps);
    if (!table->slots || !table->maps) return -1;
    memset(table->maps, 0, MAP_SLOTS * sizeof *table->maps);
    return 0;
}

Entry *table_find(const Table *table, const Key *key) {
    for (uint32_t slot = first_slot(key); table->slots[slot]; slot = (slot + 1) % SLOTS) {
        Entry *entry = table->slots[slot];
        if (memcmp(&entry->key, key, sizeof *key) == 0) return entry;
    }
    return NULL;
}

Entry *table_add(Table *table, const Key *key, const Entry *made) {
    Entry *entry = malloc(sizeof *entry);
    if (!entry) return NULL;
    *entry = *made;
    entry->key = *key;
    entry->serial = ++table->serial;
    uint32_t slot = first_slot(key);
    while (table->slots[slot]) slot = (slot + 1) % SLOTS;
    table->slots[slot] = entry;
    table->count++;
    return entry;
}

void table_clear(Table *table, void (*release)(void *)) {
    void *owners[LENT_LIMIT];
    Entry *taken = NULL;
    const uint32_t lent = table->lent_count;
    for (uint32_t i = 0; i < lent; i++) owners[i] = table->lent[i].owner;
    table->lent_count = table->lent_next = 0;
    for (uint32_t slot = 0; table->slots && slot < SLOTS; slot++) {
        Entry *entry = table->slots[slot];
        if (!entry) continue;
        entry->next = taken;
        taken = entry;
        table->slots[slot] = NULL;
    }
    table->count = 0;
    for (uint32_t i = 0; i < lent; i++) release(owners[i]);
    while (taken) {
        Entry *entry = taken;
        taken = entry->next;
        if (entry->allocation) release(entry->allocation);
        if (entry->keep) release(entry->keep);
        free(entry);
    }
}

void table_close(Table *table, void (*release)(void *)) {
    table_clear(table, release);
    free(table->slots);
    free(table->maps);
    table->slots = NULL;
    table->maps = NULL;
}

// `owner`: a number of this spec and no other, from 1; those of entries that are gone are never asked for again.
static int known_map(Table *table, const Driver *driver, const MapSpec *spec, uint64_t owner, uint64_t address,
                     TensorMap *map) {
    MapSlot *slot = &table->maps[mixed(address + owner * 0x100000001b3u) % MAP_SLOTS];
    if (slot->address != address || slot->owner != owner) {
        slot->owner = 0;  // a map that is refused leaves nothing behind
        const int status = driver_encode(driver, spec, address, &slot->map);
        if (status) return status;
        slot->address = address;
        slot->owner = owner;
    }
    *map = slot->map;
    return 0;
}

int table_maps(Table *table, const Driver *driver, const Entry *entry, const uint64_t addresses[3], TensorMap *maps) {
    const Launch *launch = &entry->launch;
    const int each = maps_of_operand(launch);
    for (int i = 0; i < launch->maps; i++) {
        const int status = known_map(table, driver, &launch->map[i], MAX_MAPS * entry->serial + (uint64_t)i,
                                     addresses[i / each], &maps[i]);
        if (status) return status;
    }
    return 0;
}

static uint32_t lent_index(const Table *table, int16_t device, void *stream, int captured) {
    uint32_t i = 0;
    for (; i < table->lent_count; i++) {
        const Lent *lent = &table->lent[i];
        if (lent->stream == stream && lent->device == device && (lent->capture != NO_CAPTURE) == captured) break;
    }
    return i;
}

const Lent *table_lent(const Table *table, int16_t device, void *stream, uint64_t capture, uint64_t bytes) {
    const uint32_t i = lent_index(table, device, stream, capture != NO_CAPTURE);
    if (i == table->lent_count || table->lent[i].capture != capture) return NULL;
    return table->lent[i].bytes >= bytes ? &table->lent[i] : NULL;
}

void *table_lend(Table *table, const Lent *lent) {
    uint32_t i = lent_index(table, lent->device, lent->stream, lent->capture != NO_CAPTURE);
    if (i == LENT_LIMIT) i = table->lent_next++ % LENT_LIMIT;
    void *replaced = i < table->lent_count ? table->lent[i].owner : NULL;
    if (i == table->lent_count) table->lent_count++;
    table->lent[i] = *lent;
    return replaced;
}

// From the first byte to the byte after the last; torch has no negative strides.
static uint64_t span_bytes(const Entry *entry, int which) {
    int64_t last = 0;
    for (int i = 0; i < 2; i++) {
        if (entry->key.shape[which][i] == 0) return 0;
        last += (entry->key.shape[which][i] - 1) * entry->key.strides[which][i];
    }
    return (uint64_t)((last + 1) * entry->element_bytes);
}

int entry_overlap(const Entry *entry, const uint64_t addresses[3]) {
    const uint64_t begin = addresses[2], end = begin + span_bytes(entry, 2);
    for (int i = 0; i < 2; i++)
        if (addresses[i] < end && begin < addresses[i] + span_bytes(entry, i)) return 1;
    return 0;
}
