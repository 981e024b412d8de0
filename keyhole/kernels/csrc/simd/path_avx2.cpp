#define KEYHOLE_PATH avx2_path
#define KEYHOLE_VECTOR "vector_avx2.h"
#define KEYHOLE_PROMPT_TILES "prompt_tiles_packed.h"
#define KEYHOLE_CODES "codes_avx2.h"
#include "path.h"
