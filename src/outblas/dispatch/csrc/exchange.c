#include "exchange.h"

#include <stddef.h>

_Static_assert(sizeof(DlTensor) == 48 && offsetof(DlTensor, type_code) == 20 && offsetof(DlTensor, byte_offset) == 40,
               "DLTensor");
_Static_assert(sizeof(Exchange) == 56 && offsetof(Exchange, tensor_from_object) == 40, "DLPackExchangeAPI");

const Exchange *exchange_of(const void *header) {
    const ExchangeHeader *found = header;
    while (found && found->major != DLPACK_MAJOR) found = found->previous;
    const Exchange *exchange = (const Exchange *)found;
    return exchange && exchange->tensor_from_object && exchange->current_stream ? exchange : NULL;
}
