/* A layer's slots: which expert is where, the two use lists, the chain of empty slots. All O(1), under table_lock.
 *
 * A process may die between any two stores. Then repair() makes the lists again from the slots' own words, so these
 * are written in an order that keeps them true: a slot's state goes to EMPTY before its expert changes, and to
 * LOADING or READY after all else is in place.
 */
#pragma once

#include "arena.h"

namespace moe_l2 {

class Lists {
  public:
    Lists(moe_l2_control * control, moe_l2_layer & layer)
        : layer(layer), slots(slots_of(control, layer)), map(slot_map_of(control, layer)), pins(pins_of(control, layer)) {}

    moe_l2_slot & slot(int32_t i) { return slots[i]; }
    int32_t slot_of(uint32_t expert) const { return map[expert]; }

    /* Take a READY slot out of its list. */
    void unlink(int32_t i) {
        moe_l2_slot & s = slots[i];
        (s.newer >= 0 ? slots[s.newer].older : layer.newest[s.list]) = s.older;
        (s.older >= 0 ? slots[s.older].newer : layer.oldest[s.list]) = s.newer;
    }

    /* Put a READY slot at the new end of the list it belongs to. */
    void push_newest(int32_t i) {
        moe_l2_slot & s = slots[i];
        s.list = pins[s.expert] != 0 ? MOE_L2_PINNED : MOE_L2_UNPINNED;
        s.last_use = ++layer.tick;
        s.newer = -1;
        s.older = layer.newest[s.list];
        (s.older >= 0 ? slots[s.older].newer : layer.oldest[s.list]) = i;
        layer.newest[s.list] = i;
    }

    void push_empty(int32_t i) {
        slots[i].older = layer.first_empty;
        layer.first_empty = i;
    }

    /* An empty slot for this expert, or -1. A layer with a slot for each expert gives slot i to expert i. */
    int32_t pop_empty(uint32_t expert) {
        if (layer.n_slots == layer.n_expert) {
            return slots[expert].state == MOE_L2_EMPTY ? (int32_t) expert : -1;
        }
        const int32_t i = layer.first_empty;
        if (i >= 0) {
            layer.first_empty = slots[i].older;
        }
        return i;
    }

    /* The slot to give up: the least recently used that nobody uses, pinned ones last (never with `spare_pinned`). */
    int32_t victim(bool spare_pinned) const {
        for (uint32_t list = MOE_L2_UNPINNED; list < (spare_pinned ? MOE_L2_PINNED : MOE_L2_LISTS); list++) {
            for (int32_t i = layer.oldest[list]; i >= 0; i = slots[i].newer) {
                if (slots[i].in_use == 0) {
                    return i;
                }
            }
        }
        return -1;
    }

    void evict(int32_t i) {
        moe_l2_slot & s = slots[i];
        unlink(i);
        store_state(s.state, MOE_L2_EMPTY);
        map[s.expert] = -1;
        s.expert = -1;
        add64(layer.counters.evictions, 1);
        add64(layer.counters.preloaded_wasted, s.preloaded);
        add64(layer.counters.resident, (uint64_t) -1);
    }

    /* Give an EMPTY slot that is in no list to an expert; it is LOADING then. */
    void begin(int32_t i, uint32_t expert, uint32_t epoch) {
        moe_l2_slot & s = slots[i];
        s.expert = (int32_t) expert;
        s.owner = epoch;
        s.preloaded = 0;
        map[expert] = i;
        store_state(s.state, MOE_L2_LOADING);
    }

    /* A LOADING slot whose expert does not come: EMPTY again, held by nobody. */
    void abandon(int32_t i) {
        moe_l2_slot & s = slots[i];
        map[s.expert] = -1;
        store_state(s.state, MOE_L2_EMPTY);
        s.expert = -1;
        s.in_use = 0;
        push_empty(i);
    }

    /* A use of a READY slot. */
    void touch(int32_t i) {
        moe_l2_slot & s = slots[i];
        if (s.preloaded != 0) {
            s.preloaded = 0;
            add64(layer.counters.preloaded_used, 1);
        }
        unlink(i);
        push_newest(i);
    }

  private:
    moe_l2_layer & layer;
    moe_l2_slot * slots;
    int32_t * map;
    const uint32_t * pins;
};

} // namespace moe_l2
